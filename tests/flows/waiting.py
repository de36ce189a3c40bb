"""The command line with a generation worker that says so and waits in its second shard: time to stop it."""

STOPS_AT_SHARD_1 = """
import sys, time
from pipeline.cli.app import main
from pipeline.stages.generate import Worker

work = Worker.__call__

def wait(self, task):
    if task.index == 1:
        print("waiting", flush=True)
        time.sleep(600)
    return work(self, task)

Worker.__call__ = wait
main()
"""
