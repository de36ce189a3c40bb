"""The fork server's last import: exempts earlier imports from garbage collection in forks."""

import gc

gc.collect()
gc.freeze()
