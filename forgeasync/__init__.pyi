from .training import TrainingFailed as TrainingFailed
from .training import TrainResult as TrainResult
from .training import train as train
