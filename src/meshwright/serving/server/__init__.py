"""A server of models under deadlines: fronts, a scheduler and workers, each a process.

channel     messages between them
slabs       shared memory in which tensors lie
gate        how a front gets its requests to the scheduler, and back
tensors     requests and answers of the Open Inference Protocol, as bytes
values      those of one input or output
front       what is answered at which path
exchange    a request and its answer
answers     answers as bytes of HTTP
counters    what was answered, for metrics
http        connections, and limits on what they may cost
connection  one of them
"""
