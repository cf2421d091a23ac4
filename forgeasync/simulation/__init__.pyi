from .clock import Clock as Clock
from .clock import crowded_work as crowded_work
from .clock import lagging as lagging
from .draws import DrawnRollout as DrawnRollout
from .engine import Engine as Engine
from .engine import EngineCost as EngineCost
from .engine import STALL_SHARE as STALL_SHARE
from .engine import engine_cost as engine_cost
from .groups import SimulatedGroup as SimulatedGroup
from .prediction import Prediction as Prediction
from .run import simulate as simulate
from .run import simulate_seeds as simulate_seeds
from .shape import SimulatedRun as SimulatedRun
from .shape import of_config as of_config
from .what_if import WhatIf as WhatIf
from .what_if import what_if as what_if

# Only tests import these.
from .groups import Sequence as Sequence
from .run import RunSimulation as RunSimulation
from .scorers import Scorers as Scorers
from .shape import FaultRates as FaultRates
from .thread import Thread as Thread
from .trainer_cost import TrainerCost as TrainerCost
from .trainer_cost import trainer_cost as trainer_cost
