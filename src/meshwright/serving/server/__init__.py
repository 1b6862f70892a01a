"""A server of models under deadlines: fronts, a scheduler and workers, each a process.

channel     messages between them
slabs       shared memory in which tensors lie
gate        how a front gets its requests to the scheduler, and back
tensors     requests and answers of the Open Inference Protocol, as bytes
front       what is answered at which path
http        connections, and limits on what they may cost
"""
