from .environment import CodingTools as CodingTools
from .section import HOW_TO_WORK as HOW_TO_WORK

# Only tests import these.
from .environment import Attempt as Attempt
from .environment import CodingEnvironment as CodingEnvironment
from .grading import Refusal as Refusal
from .grading import is_protected as is_protected
from .section import CodingAgent as CodingAgent
from .section import CodingSource as CodingSource
from .tasks import CodingProblems as CodingProblems
from .tasks import hidden_tests as hidden_tests
from .tasks import read_record as read_record
