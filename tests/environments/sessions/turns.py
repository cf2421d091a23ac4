"""Turns of every shape that a client can be shown."""

from forgeasync.environments import BrokenToolCall
from forgeasync.rollouts import FinishReason
from tests.support.sessions import call, say

BROKEN = BrokenToolCall(text='<tool_call>{"na', problem="cut off")

RICH = say(
    "Let me look.",
    reasoning="The user wants weather. 天気?",
    tool_calls=(call("call_a", city="Oslo"), call("call_b", city="Bergen ☔", days=[1, {"x": None}])),
)

TURNS = {
    "text": say("It rains. ☔"),
    "empty": say(""),
    "space": say("  \n"),
    "long": say("word " * 3000),
    "cut": say("It ra", finish_reason=FinishReason.LENGTH),
    "thought only": say("", reasoning="I should say nothing."),
    "rich": RICH,
    "call only": say("", tool_calls=(call("c", city="Oslo"),)),
    "no arguments": say("", tool_calls=(call("c"),)),
    "broken": say("Hm.", broken_tool_calls=(BROKEN,)),
    "only broken": say("", broken_tool_calls=(BROKEN, BROKEN)),
    "broken and whole": say(
        "Hm.", reasoning="r", tool_calls=(call("c", city="Oslo"),), broken_tool_calls=(BROKEN,)
    ),
    "no JSON": say("", tool_calls=(call("c", city=float("nan")),)),
}
