# Sets what Monarch reads when the modules of this folder import it.
import forgeasync.launch  # noqa: F401
