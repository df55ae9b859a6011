"""Why what can't be opened answers differently: a function, a runtime, a server.

A is a model that can be changed. Each known mistake is applied to it, and the one with which it gives B's
log-probabilities is the cause.
"""

from sqrtdk._leads import says_if_called as _says_if_called
from sqrtdk.answers.compare import diff_answers as diff_answers
from sqrtdk.answers.dialects import DIALECTS as DIALECTS
from sqrtdk.answers.records import AnsweredCause as AnsweredCause
from sqrtdk.answers.records import AnswersReport as AnswersReport
from sqrtdk.answers.server import Server as Server
from sqrtdk.answers.server_laws import SERVER_LAWS as SERVER_LAWS
from sqrtdk.answers.server_report import ServerReport as ServerReport
from sqrtdk.answers.server_report import check_server as check_server
from sqrtdk.answers.sides import Function as Function
from sqrtdk.answers.sides import Session as Session
from sqrtdk.answers.sides import Side as Side
from sqrtdk.answers.sides import session_of as session_of

__all__ = [
    "DIALECTS",
    "SERVER_LAWS",
    "AnsweredCause",
    "AnswersReport",
    "Function",
    "Server",
    "ServerReport",
    "Session",
    "Side",
    "check_server",
    "diff_answers",
    "session_of",
]

_says_if_called(__name__)
