# SPDX-License-Identifier: Apache-2.0
"""python -m kestrel, and the command `kestrel`."""
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C ends the imports without a word; main() takes it from there

from .cli import main  # noqa: E402

if __name__ == "__main__":
    main()
