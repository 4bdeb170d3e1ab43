"""A real Kubernetes cluster out of plain processes, from Go modules and Debian packages alone.

    tools          the control plane, kubelet, kubectl, helm, kwok and CoreDNS, from one pinned Go module
    images         the pods' base image, from debootstrap, without a registry
    certificates   made at each start
    control_plane  etcd, kube-apiserver, kube-controller-manager, kube-scheduler, CoreDNS, on the host
    network        a bridge; each node in a network namespace of its own
    node           containerd, kubelet, kube-proxy in namespaces and a cgroup subtree of their own (node.sh)
    fake_nodes     kwok: nodes with GPUs and NICs that nobody has
    lifecycle      up, down; `python -m e2e.cluster` is the command

The host keeps its own sysctls, cgroups, routes and mounts; `down` leaves nothing behind.
"""
