"""A server of models under deadlines: frontends, a scheduler and workers, one process each, under a supervisor.

supervisor     starts the processes, restarts those that end, and shuts them down in order
children       one child process, as the supervisor sees it
admin          the state of the server: status, health, metrics
reports        reports of processes to the supervisor
totals         sums of what processes have counted, including those that have ended
tokens         authentication tokens
channel        messages between processes
slabs          shared memory for tensors
promptness     scheduler settings for processes that must wake up promptly

front_process  a frontend: it reads requests from the network, and answers them
http           its connections, and limits on their memory and time
connection     one connection
heads          a cache of request headers
paths          HTTP routes
rpc            gRPC methods
messages       messages of gRPC
exchange       a request and its answer
front          the answers, common to HTTP and gRPC
tensors        requests and answers of the Open Inference Protocol, as bytes
values         values of one input or output
answers        HTTP answers as bytes
counters       counts of answers, for metrics
gate           how a frontend passes requests to the scheduler and gets their outcomes

scheduler      tracks requests and their deadlines, and decides what runs where
live           its policy on the real clock
decision_log   the log of its decisions
replay         how they are decided again from the log
lateness       measured delays of timers, workers and answers
peers          frontends and workers that are connected to it
served         the models, with what workers have found out about them

worker         loads the models on one device, and runs batches
models         the models of a worker: torch models, and emulated ones
"""
