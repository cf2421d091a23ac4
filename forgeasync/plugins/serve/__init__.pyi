from .environment import EndedSession as EndedSession
from .environment import ServedSessions as ServedSessions

# Only tests import these.
from .environment import MAX_CHARACTERS as MAX_CHARACTERS
from .environment import exchanges as exchanges
from .environment import judge_session as judge_session
from .environment import read_answer as read_answer
from .environment import WorkerSessions as WorkerSessions
