/* SPDX-License-Identifier: Apache-2.0
 * QEMU user-mode plugin (plugin API 1): exact executed-instruction counts per guest address.
 *
 *   cc -O2 -shared -fPIC -o build/icount.so cross/icount.c
 *   QARGS="-plugin file=build/icount.so,out=counts.txt" DIR/run program        (DIR: see arm_python.sh)
 *
 * Arguments: out=FILE  lines "address count symbol TAB disassembly"
 *            lo=A hi=B only addresses in [A, B)        nodis  without disassembly
 * Counters are not atomic: exact for one thread. The prototypes are ours, so no qemu header is needed.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef uint64_t plugin_id;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *, size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
const char *qemu_plugin_insn_symbol(const struct qemu_plugin_insn *);
char *qemu_plugin_insn_disas(const struct qemu_plugin_insn *);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *, int op, void *ptr, uint64_t imm);

EXPORT int qemu_plugin_version = 1;

typedef struct entry {
    uint64_t address, count;
    const char *symbol;
    char *text;
    struct entry *next;
} entry;

#define BUCKETS 65536
static entry *table[BUCKETS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char out[4096];
static uint64_t lo = 0, hi = ~0ull;
static int nodis;

static entry *entry_of(uint64_t address, struct qemu_plugin_insn *insn)
{
    entry **head = &table[(address >> 2) % BUCKETS];
    for (entry *e = *head; e; e = e->next)
        if (e->address == address)
            return e;
    entry *e = calloc(1, sizeof *e);
    if (!e)
        abort();
    e->address = address;
    e->symbol = qemu_plugin_insn_symbol(insn);
    e->text = nodis ? NULL : qemu_plugin_insn_disas(insn);
    e->next = *head;
    return *head = e;
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
    (void)id;
    size_t n = qemu_plugin_tb_n_insns(tb);
    for (size_t i = 0; i < n; i++) {
        struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
        uint64_t address = qemu_plugin_insn_vaddr(insn);
        if (address < lo || address >= hi)
            continue;
        pthread_mutex_lock(&mutex);
        entry *e = entry_of(address, insn);
        pthread_mutex_unlock(&mutex);
        qemu_plugin_register_vcpu_insn_exec_inline(insn, 0 /* add */, &e->count, 1);
    }
}

static void finish(plugin_id id, void *data)
{
    (void)id, (void)data;
    uint64_t total = 0;
    FILE *file = out[0] ? fopen(out, "w") : NULL;
    for (int i = 0; i < BUCKETS; i++)
        for (entry *e = table[i]; e; e = e->next) {
            total += e->count;
            if (file)
                fprintf(file, "%llx %llu %s\t%s\n", (unsigned long long)e->address, (unsigned long long)e->count,
                        e->symbol ? e->symbol : "?", e->text ? e->text : "");
        }
    if (file)
        fclose(file);
    fprintf(stderr, "icount total %llu\n", (unsigned long long)total);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
    (void)info;
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "out=", 4))
            strncpy(out, argv[i] + 4, sizeof out - 1);
        else if (!strncmp(argv[i], "lo=", 3))
            lo = strtoull(argv[i] + 3, NULL, 0);
        else if (!strncmp(argv[i], "hi=", 3))
            hi = strtoull(argv[i] + 3, NULL, 0);
        else if (!strncmp(argv[i], "nodis", 5))
            nodis = 1;
    }
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finish, NULL);
    return 0;
}
