"""A cluster's network on one machine: network namespaces, shaped links, and quotas of processor time (Linux, root).

layout        which namespaces, links and queues a cluster needs, as data; what the kernel cannot do is refused
namespaces    anonymous network namespaces, and commands run inside of them
quotas        a cgroup per rank with its share of a core
janitor       the process that removes the cgroups when the launcher is gone
lab           a cluster built, changed at times, and removed
enter         starts a rank inside of its namespace and cgroup
"""

from meshwright.emulation.lab import Emulated, Lab, check_emulation, num_cores_here, open_lab

__all__ = ["Emulated", "Lab", "check_emulation", "num_cores_here", "open_lab"]
