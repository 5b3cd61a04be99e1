"""Run functions on several ranks, each a real process, and get their results back.

`run_ranks` and `run_mortal` start ranks, call a function on each and end them; `started` leaves the middle to the test;
`Pool` keeps processes from task to task. All of them are made of `Worker`s, forked from one server (`server.py`) that
has imported everything already, and all are bounded: who does not answer in time is killed and named.
"""

from .pool import Pool as Pool
from .ranks import run_mortal as run_mortal
from .ranks import run_ranks as run_ranks
from .ranks import started as started
from .worker import DEAD as DEAD
from .worker import RankFailure as RankFailure
from .worker import Worker as Worker
from .worker import collect as collect
from .worker import take_until as take_until
from .worker import tell as tell
