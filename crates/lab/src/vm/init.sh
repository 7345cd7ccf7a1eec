#!/bin/bash
# Process 1 of a guest of the VM lab: readies the machine, runs the job, says how it ended.
export PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin HOME=/root LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
for place in /dev/shm /tmp /run /out; do mount -t tmpfs -o mode=1777 tmpfs "$place"; done
mkdir -p /run/netns /run/lock
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t debugfs debug /sys/kernel/debug
ln -s /proc/self/fd /dev/fd
ln -s /proc/self/fd/0 /dev/stdin
ln -s /proc/self/fd/1 /dev/stdout
ln -s /proc/self/fd/2 /dev/stderr
# The kernel loads algorithms and device kinds by itself, given a program to do it.
echo /usr/sbin/modprobe >/proc/sys/kernel/modprobe
for module in virtio_pci virtio_blk virtio_console; do modprobe "$module"; done
# Device files that load their module when they are first opened, such as /dev/net/tun.
while read -r module node device; do
  [ "$module" = '#' ] || [ -e "/dev/$node" ] || {
    mkdir -p "/dev/$(dirname "$node")"
    IFS=: read -r major minor <<<"${device:1}"
    mknod -m 0666 "/dev/$node" "${device:0:1}" "$major" "$minor"
  }
done <"/lib/modules/$(uname -r)/modules.devname"
hostname guest
ip link set lo up
ulimit -Hn 1048576
# shellcheck source=/dev/null
. /vm/settings

# port NAME: the device of a virtio port. Its name comes a moment after the device.
port() {
  local try entry name
  for try in {1..100}; do
    for entry in /sys/class/virtio-ports/*; do
      name=
      [ -e "$entry/name" ] && read -r name <"$entry/name"
      if [ "$name" = "$1" ]; then
        echo "/dev/${entry##*/}"
        return
      fi
    done
    sleep 0.05
  done
  echo "no port $1 after $try looks" >/dev/console
}

# disk SERIAL: the device of a virtio disk.
disk() {
  local entry serial
  for entry in /sys/block/vd*; do
    serial=
    # It ends without a newline.
    [ -e "$entry/serial" ] && read -r serial <"$entry/serial"
    [ "$serial" = "$1" ] && echo "/dev/${entry##*/}"
  done
}

# Ends all but this process and one other.
end_processes() {
  local entry pid
  for entry in /proc/[0-9]*; do
    pid=${entry##*/}
    # A kernel thread has no program.
    [ "$pid" = 1 ] || [ "$pid" = "$1" ] || [ ! -e "$entry/exe" ] || kill -KILL "$pid" 2>/dev/null
  done
}

# shellcheck disable=SC2153 # from the settings
port=$(port weft.output)
cd /root || exit
if [ "$MODE" = shell ]; then
  stty -F /dev/ttyS0 sane rows "$ROWS" cols "$COLUMNS_WIDE"
  setsid -c bash /vm/job </dev/ttyS0 >/dev/ttyS0 2>&1
  code=$?
  end_processes 1
else
  # A port can be opened once only, so programs get a pipe: some open /dev/stderr anew.
  exec {output}> >(exec cat >"$port")
  writer=$!
  bash /vm/job </dev/null >&"$output" 2>&1 {output}>&-
  code=$?
  end_processes "$writer"
  exec {output}>&-
  wait "$writer"
fi
outbox=$(disk outbox)
if [ -n "$outbox" ] && [ -n "$(ls -A /out)" ]; then
  tar -C /out -cf - . | dd of="$outbox" bs=1M iflag=fullblock conv=fsync status=none
fi
echo "$TOKEN $code" >"$port"
# The host ends the guest when it has read that.
sleep "$LINGER_S"
poweroff -f
