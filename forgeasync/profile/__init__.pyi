from .fitted_lengths import fit_lengths as fit_lengths
from .fitted_lengths import mean_of_groups as mean_of_groups
from .numbers import Distribution as Distribution
from .numbers import Estimate as Estimate
from .numbers import NUM_QUANTILES as NUM_QUANTILES
from .profile import Cores as Cores
from .profile import DecodePoint as DecodePoint
from .profile import EnvironmentTimes as EnvironmentTimes
from .profile import Hardware as Hardware
from .profile import Lengths as Lengths
from .profile import MOST_CROWDING as MOST_CROWDING
from .profile import MOST_LAG as MOST_LAG
from .profile import Origin as Origin
from .profile import Profile as Profile
from .profile import Setup as Setup
from .profile import TrainPoint as TrainPoint
from .profile import WeightTimes as WeightTimes
from .profile_file import partial_of as partial_of
from .profile_file import read_profile as read_profile
from .profile_file import write_profile as write_profile
from .steady_steps import num_steps_ahead as num_steps_ahead
from .steady_steps import steady_steps as steady_steps
from .tables import DecodeTable as DecodeTable
from .tables import TrainTable as TrainTable

# Only tests import these.
from .fitted_lengths import alikeness as alikeness
