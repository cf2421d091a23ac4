from .fit import Capacity as Capacity
from .outcome import Verdict as Verdict
from .outcome import changes_table as changes_table
from .outcome import findings as findings
from .outcome import findings_table as findings_table
from .rule import Draft as Draft
from .rule import Stage as Stage
from .rule import rehearse_data as rehearse_data
from .rule import rehearsed as rehearsed
from .tiny_model import write_model as write_model

# Only tests import these.
from .fit import GIB as GIB
from .fit import largest_part as largest_part
from .fit import needed_bytes as needed_bytes
from .made_up_score import score as score
from .rule import GENERATED as GENERATED
from .rule import Rehearsal as Rehearsal
from .tiny_model import small_facts as small_facts
