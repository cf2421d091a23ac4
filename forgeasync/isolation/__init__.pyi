from .backend import ExecResult as ExecResult
from .backend import FileTooLarge as FileTooLarge
from .backend import KilledBy as KilledBy
from .backend import PythonResult as PythonResult
from .backend import PythonSession as PythonSession
from .backend import SandboxBackend as SandboxBackend
from .backend import SandboxError as SandboxError
from .backend import SandboxUnavailable as SandboxUnavailable
from .backend import SessionEnded as SessionEnded
from .backend import Shell as Shell
from .backend import ShellResult as ShellResult
from .bubblewrap import HOW_TO_GET as HOW_TO_GET
from .bubblewrap import bubblewrap_programs as bubblewrap_programs
from .sandbox import Sandbox as Sandbox
from .sandbox import check_sandbox as check_sandbox
from .sandbox import sandbox_warning as sandbox_warning

# Only tests import these.
from .backend import SandboxClosed as SandboxClosed
from .bubblewrap import find_program as find_program
from .containers import exec_command as exec_command
from .containers import kill_command as kill_command
from .containers import remove_command as remove_command
from .containers import run_command as run_command
