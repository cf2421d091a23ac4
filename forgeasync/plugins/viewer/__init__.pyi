from .perfetto import write_trace as write_trace
from .run_reader import DEMO_RUN as DEMO_RUN
from .run_reader import NoRun as NoRun
from .run_reader import RunReader as RunReader
from .server import PortInUse as PortInUse
from .server import serve_until_stopped as serve_until_stopped
from .run_reader import status_lines as status_lines
from .run_reader import status_of as status_of

# Only tests import these.
from .followed_file import FollowedFile as FollowedFile
from .rollouts import NotFound as NotFound
from .server import application as application
from .server import serve as serve
