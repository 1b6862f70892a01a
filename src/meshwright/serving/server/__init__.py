"""A server of models under deadlines: fronts, a scheduler and workers, each a process, and who watches over them.

supervisor     starts the processes, starts again those that end, and ends them all in order
children       one of them, as the supervisor has it
admin          how the server is: status, health, metrics
reports        what processes tell the supervisor
totals         what they have counted, those that have ended among them
tokens         what requests have to bring
channel        messages between processes
slabs          shared memory in which tensors lie
promptness     processes that begin soon after they are woken

front_process  a front: it reads requests from the network, and answers them
http           its connections, and limits on what they may cost
connection     one of them
heads          heads of requests that were read before
paths          what is answered at which path
rpc            what is answered over gRPC
messages       messages of that
exchange       a request and its answer
front          what is answered, over HTTP and gRPC alike
tensors        requests and answers of the Open Inference Protocol, as bytes
values         those of one input or output
answers        answers as bytes of HTTP
counters       what was answered, for metrics
gate           how a front gets its requests to the scheduler, and back

scheduler      knows of requests where they are and when they are due, and decides what runs where
live           its policy on the real clock
decision_log   what is written down of its decisions
replay         how that is decided again
lateness       how late things happen here, measured
peers          the fronts and workers that it talks with
served         the models, with what workers have found out about them

worker         loads the models on one device, and runs batches
models         what it runs: torch models, and emulated ones
"""
