from .growth import Growth as Growth
from .measured import KEYS as KEYS
from .measured import MeasuredSteps as MeasuredSteps
from .measured import MeasuredWindow as MeasuredWindow
from .measured import OTHER_KEYS as OTHER_KEYS
from .measured import WINDOW_STEPS as WINDOW_STEPS
from .process import PredictionRequest as PredictionRequest
from .profile_checks import check_prediction as check_prediction
from .profile_checks import origin_words as origin_words
from .record import Prediction as Prediction
from .record import PredictionRecord as PredictionRecord
from .record import read_prediction as read_prediction
from .record import write_prediction as write_prediction
from .simulated import SampledLengths as SampledLengths
from .simulated import prediction_words as prediction_words
from .verdict import SplitAdvice as SplitAdvice
from .verdict import bound_words as bound_words
from .verdict import verdict_lines as verdict_lines

# Only tests import these.
from .measured import NUM_GENERATORS as NUM_GENERATORS
from .measured import num_first_steps as num_first_steps
from .record import PredictedChange as PredictedChange
from .record import PredictedChanges as PredictedChanges
from .record import PredictedRun as PredictedRun
from .record import PredictedSplit as PredictedSplit
from .simulated import predictions as predictions
from .simulated import with_lengths as with_lengths
