"""Definitions of the metrics of runs that serve people."""

from forgeasync.observability.metric import Metric, Topic

_SERVED = "runs that serve people"

SERVING = Topic(
    heading="Serving people",
    note="docs/serving.md. They are as the worker has reported them, up to a second ago; what a worker "
    "counted in its last second before it died is lost.",
    metrics=(
        Metric(key="serving/num_opened", meaning="Sessions opened so far.", when=_SERVED),
        Metric(
            key="serving/num_refused",
            meaning="Sessions refused so far because `serving.max_open_sessions` were open.",
            when=_SERVED,
        ),
        Metric(key="serving/num_open", meaning="Sessions that are open, trained on or not.", when=_SERVED),
        Metric(
            key="serving/num_on_offer",
            meaning="Episodes that wait for a client. Sessions opened while there is none are not "
            "trained on.",
            when=_SERVED,
        ),
        Metric(
            key="serving/num_ended_<how>",
            meaning="Sessions so far that ended so (`SessionEnd` in "
            "forgeasync/environments/sessions/session.py).",
            when=f"{_SERVED}, for each way",
        ),
        Metric(
            key="serving/num_untrained_<reason>",
            meaning="Sessions so far that are not trained on (`Untrained` in "
            "forgeasync/plugins/serve/desk.py).",
            when=f"{_SERVED}, for each reason",
        ),
        Metric(
            key="serving/num_scored_by_<source>",
            meaning="Sessions so far whose score came from there (`serving.score_from`).",
            when=f"{_SERVED}, for each source",
        ),
        Metric(
            key="serving/num_feedback",
            meaning="Verdicts so far of sessions that have ended, trained on or not.",
            when=_SERVED,
        ),
        Metric(
            key="serving/feedback_mean",
            meaning="Mean score of these verdicts.",
            when=f"{_SERVED}, once there is one",
        ),
        Metric(
            key="serving/num_judged",
            meaning="Replies so far that `agents.judge` has rated.",
            when=_SERVED,
        ),
        Metric(
            key="serving/num_unreadable_judgements",
            meaning="Replies so far that it was asked about and did not rate: its answer was neither word, "
            "or the exchange did not fit its context. They count for nothing.",
            when=_SERVED,
        ),
        Metric(
            key="serving/turn_p50_s",
            meaning="Median number of seconds from a request for a turn to its end, over the last 1,024 "
            "turns.",
            when=f"{_SERVED}, once there was a turn",
        ),
        Metric(
            key="serving/turn_p99_s",
            meaning="Number of seconds that 99 % of these turns took at most.",
            when=f"{_SERVED}, once there was a turn",
        ),
    ),
)
