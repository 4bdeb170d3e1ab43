#!/bin/bash
# One node. First outside: a cgroup subtree, then namespaces. Then inside them, as pid 1: mounts, containerd, images,
# kubelet, kube-proxy. All of it ends with this process. Parameters come from the environment: node.py.
set -eu

if [ -z "${INSIDE:-}" ]; then
  if [ -e /sys/fs/cgroup/cgroup.controllers ]; then  # cgroup v2
    mkdir -p "/sys/fs/cgroup/$CGROUP"
    echo $$ >"/sys/fs/cgroup/$CGROUP/cgroup.procs"
  else
    for hierarchy in /sys/fs/cgroup/*/; do
      group=$hierarchy$CGROUP
      mkdir -p "$group"
      if [ -e "$group/cpuset.cpus" ]; then  # a new cpuset is empty, and nothing may enter it
        cat "$hierarchy/cpuset.cpus" >"$group/cpuset.cpus"
        cat "$hierarchy/cpuset.mems" >"$group/cpuset.mems"
      fi
      echo $$ >"$group/cgroup.procs"
    done
  fi
  export INSIDE=1
  exec nsenter "--net=/run/netns/$NETWORK_NAMESPACE" unshare --mount --pid --uts --ipc --cgroup --fork --kill-child bash "$0"
fi

# Nothing that is mounted here shows outside; the cgroup subtree is mounted anew as the whole of it.
mount --make-rprivate /
version=1
[ -e /sys/fs/cgroup/cgroup.controllers ] && version=2
hierarchies=$(cd /sys/fs/cgroup && find . -maxdepth 1 -mindepth 1 -type d -printf '%f\n' | grep -v '^unified$' || true)
umount -R /sys
mount -t sysfs sysfs /sys
if [ $version = 2 ]; then
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
  mkdir -p /sys/fs/cgroup/init  # a group with children may hold no process
  while read -r pid; do echo "$pid" >/sys/fs/cgroup/init/cgroup.procs || true; done </sys/fs/cgroup/cgroup.procs
  sed 's/\</+/g' /sys/fs/cgroup/cgroup.controllers >/sys/fs/cgroup/cgroup.subtree_control
else
  mount -t tmpfs tmpfs /sys/fs/cgroup
  for hierarchy in $hierarchies; do
    mkdir "/sys/fs/cgroup/$hierarchy"
    options=$hierarchy
    [ "$hierarchy" = systemd ] && options=none,name=systemd
    mount -t cgroup -o "$options" cgroup "/sys/fs/cgroup/$hierarchy"
  done
fi

# Still the host's /proc: the first of our pids is the host's, which is how `down` knows this process.
while read -r key pid _; do [ "$key" = NSpid: ] && break; done </proc/self/status
stat=$(cat "/proc/$pid/stat")
set -- ${stat##*) }
echo "$pid ${20}" >"$STATE/init.pid"
mount -t proc proc /proc

mount -t tmpfs tmpfs /run
mkdir -p /run/lock
# The kubelet insists on three sysctls, which are the host's: it is shown what it wants to see.
for setting in vm/overcommit_memory=1 kernel/panic=10 kernel/panic_on_oops=1; do
  name=${setting%%=*}
  file=/run/sysctl.${name//\//.}
  echo "${setting#*=}" >"$file"
  mount --bind "$file" "/proc/sys/$name"
done
mount --bind "$STATE/kubelet" /var/lib/kubelet
mount --make-rshared /var/lib/kubelet
mount --bind "$STATE/var-lib-cni" /var/lib/cni
mount --bind "$STATE/pods" /var/log/pods
mount --bind "$STATE/containers" /var/log/containers
hostname "$NODE"
ulimit -n "$(ulimit -Hn)"

containerd --config "$STATE/containerd.toml" >>"$LOGS/$NODE-containerd.log" 2>&1 &
for _ in $(seq 200); do ctr version >/dev/null 2>&1 && break; sleep 0.05; done
for image in $IMAGES; do ctr -n k8s.io images import "$image" >>"$LOGS/$NODE-images.log" 2>&1; done
"$TOOLS/kubelet" --config="$STATE/kubelet.json" --kubeconfig="$KUBECONFIG" --hostname-override="$NODE" \
  --node-ip="$ADDRESS" --root-dir=/var/lib/kubelet --cert-dir="$STATE/kubelet-tls" >>"$LOGS/$NODE-kubelet.log" 2>&1 &
"$TOOLS/kube-proxy" --config="$STATE/proxy.json" >>"$LOGS/$NODE-proxy.log" 2>&1 &
trap 'exit 0' TERM
# Pid 1 reaps what pods leave. If one of the three daemons ends, the node goes on without it, as a machine does.
while :; do wait -n || true; sleep 0.2; done
