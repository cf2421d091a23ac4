from .lanes import Lane as Lane
from .lanes import NOT_THERE as NOT_THERE
from .lanes import Span as Span
from .lanes import named_lanes as named_lanes
from .lanes import shares as shares
from .lanes import states_between as states_between
from .proc_trace import SUFFIX as SUFFIX
from .proc_trace import close_trace as close_trace
from .proc_trace import doing as doing
from .proc_trace import open_trace as open_trace
from .proc_trace import span as span
from .proc_trace import started as started
from .states import ORDER as ORDER
from .states import State as State

# Only tests import these.
from .states import StateClock as StateClock
from .trace_lines import Changed as Changed
from .trace_lines import Ended as Ended
from .trace_lines import Facts as Facts
from .trace_lines import Line as Line
from .trace_lines import Lived as Lived
from .trace_lines import Opened as Opened
from .trace_lines import Pending as Pending
from .trace_lines import SHORTEST_S as SHORTEST_S
from .trace_lines import UnknownTrace as UnknownTrace
from .trace_lines import decode as decode
from .trace_lines import encode as encode
