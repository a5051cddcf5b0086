/* Guarded buffers: a mapping of its own for each, no access pages at both ends. SPDX-License-Identifier: Apache-2.0 */
#define _DEFAULT_SOURCE
#include "checkasm.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 64, CANARY = 0xa5 };

typedef struct guarded {
    unsigned char *map, *body, *data;
    size_t map_bytes, body_bytes, bytes;
} guarded;
static guarded live[MOST];
static int count;

void *buffer_new(size_t bytes, size_t align, int place, int fill)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (count == MOST) { fprintf(stderr, "checkasm: more than %d buffers\n", MOST); exit(2); }
    guarded *g = &live[count++];
    g->bytes = bytes;
    g->body_bytes = (bytes + align + page - 1) / page * page;
    g->map_bytes = g->body_bytes + 2 * page;
    g->map = mmap(NULL, g->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g->map == MAP_FAILED || mprotect(g->map + page, g->body_bytes, PROT_READ | PROT_WRITE)) { perror("checkasm: mmap"); exit(2); }
    g->body = g->map + page;
    g->data = place == AT_HEAD ? g->body : g->body + (g->body_bytes - bytes) / align * align;
    memset(g->body, CANARY, g->body_bytes);
    memset(g->data, fill, bytes);
    return g->data;
}

void buffer_seal(const void *data)
{
    for (int i = 0; i < count; i++)
        if (live[i].data == data) mprotect(live[i].body, live[i].body_bytes, PROT_READ);
}

const char *buffers_damage(void)
{
    static char text[96];
    for (int i = 0; i < count; i++) {
        const guarded *g = &live[i];
        const unsigned char *end = g->data + g->bytes;
        for (const unsigned char *p = g->body; p < g->body + g->body_bytes; p++) {
            if (p == g->data) p = end;
            if (p == g->body + g->body_bytes) break;
            if (*p != CANARY) {
                snprintf(text, sizeof text, "buffer %d of %zu bytes: written at byte %td", i, g->bytes, p - g->data);
                return text;
            }
        }
    }
    return NULL;
}

void buffers_free(void)
{
    while (count) { count--; munmap(live[count].map, live[count].map_bytes); }
}
