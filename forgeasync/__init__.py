"""Asynchronous RL post-training for mixture-of-experts models.

    import forgeasync as fa

    result = fa.train("configs/tiny_moe_cpu.yaml", {"max_steps": 20}, reward=my_reward)

Importing the package loads nothing: each name is imported from its module when it is first used.
``__init__.pyi`` lists the names, and docs/api.md describes them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
