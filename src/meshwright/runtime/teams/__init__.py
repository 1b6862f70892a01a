"""Plans that split ops: one rank of the plan is a team of processes side by side, which share each op out.

grid          which process stands where in its team, and with whom it exchanges
shares        what one process has of a tensor that lies split, and the whole of what all have
conversions   the ops that the sharding added, as autograd functions over process groups
grouped       sorted choices on their way to the processes that have their experts, and home
operators     ops that compute a share in another way than the whole
local_parts   a stage's module as one process of a team computes it
"""

from meshwright.runtime.teams.grid import TeamPosition, make_grid
from meshwright.runtime.teams.local_parts import LocalModel, local_model

__all__ = ["LocalModel", "TeamPosition", "local_model", "make_grid"]
