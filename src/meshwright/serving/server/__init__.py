"""A server of models under deadlines: frontends, a scheduler and workers, one process each, under a supervisor.

supervisor     starts the processes, restarts those that end, and shuts them down in order
children       one child process, as the supervisor sees it
admin          the state of the server: status, health, metrics
reports        reports of processes to the supervisor, and the supervisor's orders to processes
totals         sums of the counts of all processes, including those that have ended
tokens         authentication tokens
channel        messages between processes
slabs          shared memory for tensors
promptness     settings of the operating system's scheduler for processes that must wake up promptly

front_process  the process of a frontend, which reads requests from the network and answers them
http           HTTP connections of a frontend, with limits on their memory and time
connection     one HTTP connection
heads          a cache of request headers
paths          HTTP routes
rpc            gRPC methods
messages       messages of gRPC
exchange       one request and its answer
front          how a frontend answers requests, for HTTP and gRPC alike
tensors        requests and answers of the Open Inference Protocol, as bytes
values         values of one input or output
answers        HTTP answers as bytes
counters       counts of answers, for metrics
gate           how a frontend passes requests to the scheduler and gets their outcomes

scheduler      tracks requests and their deadlines, and decides which device runs which batch
live           the scheduling policy on the real clock
decision_log   the log of the policy's decisions
replay         repeats the decisions of a log, and compares them
lateness       measured delays of timers, workers and answers
peers          the frontends and workers that are connected to the scheduler
served         the served models, with the tensors and latencies that workers have found

worker         loads the models onto one device, and runs batches
models         the models of a worker: torch models and emulated models
"""
