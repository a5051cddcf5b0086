#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A stand-in board: a whole emulated aarch64 Debian with sshd on loopback and a user without rights, so that build -> deploy -> check -> bench ->
# results back is one real ssh session. It has no network beyond that port. Its speed says nothing of a board's.
#   usage: cross/board_vm.sh build DIR                    the image, from the host's own package sources (about 300 MB; host apt state untouched)
#          cross/board_vm.sh boot DIR [CPU] [PORT] [MIB]  CPU: cortex-a72 | cortex-a76 (default) | max,pauth-impdef=on; returns when sshd answers
#          cross/board_vm.sh stop DIR
# Afterwards `ssh -F DIR/ssh_config board` logs in as pi. Each boot begins with the image as built.
# Needs qemu-system-arm cpio openssh-client e2fsprogs on Debian 12 or 13.
set -euo pipefail
verb=${1:?usage: board_vm.sh build|boot|stop DIR ...}
dir=$(realpath -m "${2:?folder}")
say() { echo "board_vm.sh: $*" >&2; }
case $(. /etc/os-release; echo "${VERSION_CODENAME:-}") in
  bookworm) version=3.11 ;;
  trixie) version=3.13 ;;
  *) say "the host is no Debian bookworm or trixie"; exit 1 ;;
esac
for need in qemu-system-aarch64 cpio ssh ssh-keygen mke2fs dpkg-deb; do
  PATH=$PATH:/usr/sbin:/sbin command -v $need > /dev/null || { say "no $need (apt-get install qemu-system-arm cpio openssh-client e2fsprogs)"; exit 1; }
done
PATH=$PATH:/usr/sbin:/sbin
mkdir -p "$dir"
cd "$dir"

fetch() { # FOLDER install|download PACKAGE...: unpack arm64 packages; install: with what they depend on
  local root=$1 how=$2 state=$dir/apt; shift 2
  mkdir -p "$root" "$state"/state/lists/partial "$state"/cache/archives/partial "$state"/parts
  : > "$state/state/status"
  local file
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.sources; do
    if [ -s "$file" ]; then rm -f "$state"/parts/*; cp "$file" "$state/parts/"; fi   # the newer place wins
  done
  sed -i '/^Architectures:/d' "$state"/parts/*
  local options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$state/state" -o Dir::State::status="$state/state/status"
    -o Dir::Cache="$state/cache" -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$state/parts" -o APT::Install-Recommends=0
    -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Acquire::Languages=none -o Acquire::Retries=3)
  if [ ! -e "$state/updated" ]; then apt-get "${options[@]}" -qq update > "$state/log" 2>&1 || { cat "$state/log" >&2; exit 1; }; touch "$state/updated"; fi
  rm -f "$state"/cache/archives/*.deb
  if [ "$how" = install ]; then apt-get "${options[@]}" -qq -y -d install "$@" > "$state/log" 2>&1 || { cat "$state/log" >&2; exit 1; }
  else (cd "$state/cache/archives" && apt-get "${options[@]}" -qq download "$@") > "$state/log" 2>&1 || { cat "$state/log" >&2; exit 1; }; fi
  for file in "$state"/cache/archives/*.deb; do dpkg-deb -x "$file" "$root"; done
}

build() {
  if [ ! -e rootfs/complete ]; then
    rm -rf rootfs
    say "packages of the board's system"
    # venv is in the standard library; ensurepip (Debian: python3-venv) is left out, as on a board where nobody installed it
    fetch "$dir/rootfs" install python$version-minimal libpython$version-stdlib libstdc++6 libgcc-s1 zlib1g libffi8 coreutils dash busybox-static openssh-server
    touch rootfs/complete
  fi
  if [ ! -d kernel/boot ]; then
    say "the kernel"
    fetch "$dir/kernel" download linux-image-cloud-arm64   # the meta package: its dependency names the kernel
    local image; image=$(dpkg-deb -f apt/cache/archives/linux-image-cloud-arm64_*.deb Depends | grep -o 'linux-image-[^ ]*')
    fetch "$dir/kernel" download "$image"
  fi
  local root=rootfs modules tool module
  modules=$(echo kernel/lib/modules/*/kernel kernel/usr/lib/modules/*/kernel | tr ' ' '\n' | grep -v '\*' | head -1)

  rm -rf initial; mkdir -p initial/bin initial/dev initial/proc initial/sys initial/mnt initial/modules
  cp "$(ls $root/bin/busybox $root/usr/bin/busybox 2> /dev/null | head -1)" initial/bin/busybox
  for tool in sh mount insmod switch_root sleep; do ln -s busybox initial/bin/$tool; done
  for module in drivers/virtio/{virtio,virtio_ring,virtio_pci_legacy_dev,virtio_pci_modern_dev,virtio_pci} drivers/block/virtio_blk net/core/failover \
    drivers/net/{net_failover,virtio_net} drivers/char/hw_random/virtio-rng; do
    if [ -f "$modules/$module.ko" ]; then cp "$modules/$module.ko" initial/modules/
    elif [ -f "$modules/$module.ko.xz" ]; then xz -dc "$modules/$module.ko.xz" > initial/modules/"$(basename "$module")".ko
    else continue; fi   # built in
    basename "$module" >> initial/modules/order
  done
  cat > initial/init <<'I'
#!/bin/sh
mount -t devtmpfs d /dev; mount -t proc p /proc; mount -t sysfs s /sys
for pass in 1 2 3 4; do while read m; do insmod /modules/$m.ko 2>/dev/null; done < /modules/order; done   # whatever their order of dependence is
n=0; until [ -b /dev/vda ] || [ $n -ge 100 ]; do sleep 0.1; n=$((n+1)); done
mount -t ext4 /dev/vda /mnt
mount --move /dev /mnt/dev; mount --move /proc /mnt/proc; mount --move /sys /mnt/sys
exec switch_root /mnt /init
I
  chmod +x initial/init
  (cd initial; find . | cpio -o -H newc --quiet | gzip -1) > initial.gz

  mkdir -p $root/dev $root/proc $root/sys $root/run $root/tmp $root/bin $root/etc/ssh $root/var/empty $root/home/pi/.ssh
  # busybox where Debian's own tool was not installed
  for tool in sh mount ip cat ls mkdir rm mv sleep tar chown uname nproc ps free df id sysctl su; do
    [ -e $root/bin/$tool ] || [ -e $root/usr/bin/$tool ] || ln -s "$([ -e $root/bin/busybox ] && echo busybox || echo ../usr/bin/busybox)" $root/bin/$tool
  done
  [ -e $root/bin/sh ] || ln -s dash $root/bin/sh
  [ -e $root/usr/bin/python3 ] || ln -s python$version $root/usr/bin/python3
  printf 'root:x:0:0:root:/:/bin/sh\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\npi:x:1000:1000::/home/pi:/bin/sh\n' > $root/etc/passwd
  printf 'root:x:0:\nnogroup:x:65534:\npi:x:1000:\n' > $root/etc/group
  printf 'root:*:19000:0:99999:7:::\npi:*:19000:0:99999:7:::\n' > $root/etc/shadow
  printf 'passwd: files\ngroup: files\nshadow: files\n' > $root/etc/nsswitch.conf
  [ -f key ] || ssh-keygen -q -t ed25519 -N '' -f key
  [ -f hostkey ] || ssh-keygen -q -t ed25519 -N '' -f hostkey
  cp hostkey $root/etc/ssh/ssh_host_ed25519_key; chmod 600 $root/etc/ssh/ssh_host_ed25519_key
  cp key.pub $root/home/pi/.ssh/authorized_keys; chmod 700 $root/home/pi/.ssh; chmod 600 $root/home/pi/.ssh/authorized_keys
  # StrictModes off: who owns the image's files is whoever built it
  printf '%s\n' 'HostKey /etc/ssh/ssh_host_ed25519_key' 'UsePAM no' 'PasswordAuthentication no' 'PermitRootLogin no' 'StrictModes no' 'UseDNS no' \
    'Subsystem sftp internal-sftp' > $root/etc/ssh/sshd_config
  cat > $root/init <<'I'
#!/bin/sh
export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
mount -t tmpfs t /run; mount -t tmpfs t /tmp; chmod 1777 /tmp; mkdir -p /run/sshd /dev/pts; mount -t devpts p /dev/pts
ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
chown -R 1000:1000 /home/pi
/usr/sbin/sshd
while :; do sleep 1000; done
I
  chmod +x $root/init
  rm -f board.ext4; truncate -s 3G board.ext4
  mke2fs -q -t ext4 -O ^has_journal -d $root board.ext4
  say "built $dir/board.ext4"
}

boot() { # [CPU] [PORT] [MIB]
  local cpu=${1:-cortex-a76} port=${2:-22220} memory=${3:-2048} tries
  [ -f board.ext4 ] || { say "no image in $dir: board_vm.sh build first"; exit 1; }
  qemu-system-aarch64 -M virt -cpu "$cpu" -smp 2 -m "$memory" -nographic -nodefaults -serial file:serial.log -no-reboot \
    -kernel kernel/boot/vmlinuz-* -initrd initial.gz -append "console=ttyAMA0 quiet panic=1" \
    -drive file=board.ext4,format=raw,if=none,id=d0,snapshot=on -device virtio-blk-pci,drive=d0 \
    -netdev "user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:$port-:22" -device virtio-net-pci,netdev=n0,romfile= -device virtio-rng-pci > qemu.log 2>&1 < /dev/null &
  echo $! > qemu.pid
  printf 'Host board\n  HostName 127.0.0.1\n  Port %s\n  User pi\n  IdentityFile %s/key\n  IdentitiesOnly yes\n  UserKnownHostsFile %s/known_hosts\n  StrictHostKeyChecking yes\n  LogLevel ERROR\n' \
    "$port" "$dir" "$dir" > ssh_config
  printf '[127.0.0.1]:%s %s\n' "$port" "$(cut -d' ' -f1,2 hostkey.pub)" > known_hosts
  for ((tries = 0; tries < 300; tries++)); do
    if ssh -F ssh_config -o ConnectTimeout=5 board true < /dev/null 2> /dev/null; then say "ssh -F $dir/ssh_config board"; return; fi
    kill -0 "$(cat qemu.pid)" 2> /dev/null || { cat qemu.log serial.log >&2; exit 1; }
    sleep 0.3
  done
  say "no answer on port $port"; tail -20 serial.log >&2; exit 1
}

case $verb in
  build) build ;;
  boot) boot "${@:3}" ;;
  stop) if [ -f qemu.pid ]; then kill "$(cat qemu.pid)" 2> /dev/null || true; rm -f qemu.pid; fi ;;
  *) say "build, boot or stop"; exit 2 ;;
esac
