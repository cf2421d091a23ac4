"""The section on deadlines."""

from forgeasync.config.section import Seconds, Section


class TimeoutSection(Section):
    """Deadlines of actor calls, in seconds. Past one, the run ends with an error."""

    setup_s: Seconds = 300.0
    generate_s: Seconds = 300.0
    train_step_s: Seconds = 600.0
    weights_s: Seconds = 120.0
    score_s: Seconds = 60.0
    """For one group, from when the scorer begins with it: past it, the attempt has failed, see ``scorer``."""
    episode_s: Seconds = 600.0
    """For one episode of an environment, from its start to its score: past it, its group is given up."""
    host_s: Seconds = 60.0
    """Of many hosts: one that does not answer for this long ends the run, and one that is not asked for twice
    this long ends itself."""
    sigterm_s: Seconds = 30.0
    """What a run that is told to stop (SIGTERM) takes at most for a checkpoint, which gets half of it, and
    for the export of its weights. What kills it afterwards (KillWait of Slurm, terminationGracePeriodSeconds
    of Kubernetes, both 30 s by default) should leave 20 s more, in which its processes end.
    """
