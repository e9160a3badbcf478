"""What every test may rely on, wherever the tests were started from."""

import signal

# A background job of a shell, or nohup, starts programs with these ignored; what tests start would inherit that.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
