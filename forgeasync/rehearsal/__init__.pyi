from .data_rule import rehearse_data as rehearse_data
from .draft import Draft as Draft
from .fit import Capacity as Capacity
from .model_folder import write_model as write_model
from .outcome import Verdict as Verdict
from .outcome import findings as findings
from .report import changes_table as changes_table
from .report import findings_table as findings_table
from .rule import Stage as Stage
from .rule import rehearsed as rehearsed

# Only tests import these.
from .data_rule import GENERATED as GENERATED
from .fit import GIB as GIB
from .fit import largest_part as largest_part
from .fit import needed_bytes as needed_bytes
from .made_up_score import score as score
from .model_rule import small_facts as small_facts
from .rule import Rehearsal as Rehearsal
