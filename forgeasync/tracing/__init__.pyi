from .process_trace import Lane as Lane
from .process_trace import NOT_THERE as NOT_THERE
from .process_trace import ORDER as ORDER
from .process_trace import SUFFIX as SUFFIX
from .process_trace import Span as Span
from .process_trace import State as State
from .process_trace import close_trace as close_trace
from .process_trace import doing as doing
from .process_trace import named_lanes as named_lanes
from .process_trace import open_trace as open_trace
from .process_trace import shares as shares
from .process_trace import span as span
from .process_trace import started as started
from .process_trace import states_between as states_between

# Only tests import these.
from .process_trace import Changed as Changed
from .process_trace import Facts as Facts
from .process_trace import Line as Line
from .process_trace import Lived as Lived
from .process_trace import Opened as Opened
from .process_trace import Pending as Pending
from .process_trace import SHORTEST_S as SHORTEST_S
from .process_trace import StateClock as StateClock
from .process_trace import UnknownTrace as UnknownTrace
from .process_trace import decode as decode
from .process_trace import encode as encode
