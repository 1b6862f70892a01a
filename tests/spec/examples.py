"""One legal document of each type, with something in every field, for tests that walk through all of a document."""

import numpy as np

from meshwright.spec import (
    BatchMeasurement,
    Call,
    Cluster,
    Deployment,
    DeviceGroup,
    DeviceKind,
    Diurnal,
    Extent,
    Gamma,
    GradientExchange,
    Graph,
    Group,
    Head,
    Latency,
    Layer,
    Link,
    Loader,
    Measurements,
    Node,
    Nvme,
    Op,
    Opcode,
    OpMeasurement,
    Optimizer,
    OptimizerMeasurement,
    Outage,
    PlacedStage,
    Placement,
    Plan,
    Poisson,
    Program,
    Query,
    Section,
    ServedModel,
    Server,
    StagePlan,
    Straggler,
    Stream,
    Tensor,
    TensorSpec,
    Timeline,
    Trace,
    TransferMeasurement,
    Trunk,
    Workload,
    empty_section,
)
from meshwright.spec.cluster import NodePath, Racks
from meshwright.spec.made_with import MadeWith
from meshwright.spec.quantities import Bytes, Seconds
from meshwright.spec.sharding import OpPlacement, Sharding

LINK = Link(latency_s=1e-6, bandwidth_bytes_per_s=1e9)

CLUSTER = Cluster(
    name="pair",
    device_kinds=(
        DeviceKind(
            name="X1",
            memory_bytes=2**30,
            memory_bandwidth_bytes_per_s=1e12,
            peak_flops_per_s={"float32": 1e13, "bfloat16": 1e14},
            source="made up",
            num_multiprocessors=10,
            cache_bytes=2**20,
            clock_hz=1e9,
            compute_capability=8.0,
        ),
        DeviceKind(
            name="X1 slow",
            memory_bytes=2**30,
            memory_bandwidth_bytes_per_s=1e12,
            peak_flops_per_s={"float32": 1e13},
            source="made up",
            slowdown=2.0,
            usual="X1",
        ),
    ),
    nodes=(
        Node(
            name="n0",
            devices=(DeviceGroup(kind="X1", count=2),),
            host_memory_bytes=2**33,
            num_cores=8,
            device_link=LINK,
            pcie=LINK,
            nic=Link(latency_s=5e-6, bandwidth_bytes_per_s=1e8),
            num_nics=2,
            host_memory_bandwidth_bytes_per_s=1e11,
            nvme=Nvme(capacity_bytes=2**40, read_bytes_per_s=5e9, write_bytes_per_s=2.5e9),
            source="made up",
        ),
        Node(
            name="n1",
            devices=(DeviceGroup(kind="X1", count=2),),
            host_memory_bytes=2**33,
            num_cores=8,
            device_link=LINK,
            pcie=LINK,
            nic=LINK,
        ),
    ),
    racks=Racks(nodes_per_rack=1, num_uplinks=2, uplink=LINK),
    paths=(NodePath(nodes=(0, 1), link=LINK),),
)

WORKLOAD = Workload(
    kind="inference",
    global_batch=12,
    precision="bfloat16",
    optimizer=Optimizer(kind="sgd", momentum=True),
    loader=Loader(seconds_per_sample=0.25, depth=3),
)

_B = Extent(0, 1)
GRAPH = Graph(
    name="two layers",
    model_flops=Extent(3, 64),
    tensors=(
        Tensor(name="x", shape=(_B, Extent(4)), dtype="float32", role="input", storage=0),
        Tensor(
            name="w",
            shape=(Extent(4), Extent(4)),
            dtype="float32",
            role="parameter",
            storage=1,
            requires_grad=True,
            aliases=("v",),
        ),
        Tensor(name="h", shape=(_B, Extent(4)), dtype="float32", role="activation", storage=2, requires_grad=True),
        Tensor(name="mask", shape=(Extent(1, 4),), dtype="bool", role="saved", storage=3),
        Tensor(name="loss", shape=(), dtype="float32", role="activation", storage=4, requires_grad=True),
    ),
    ops=(
        Op(
            name="linear",
            kind="aten.linear.default",
            inputs=(0, 1),
            outputs=(2,),
            attributes=(("p", "0.5"),),
            flops=Extent(0, 32),
            backward_flops=Extent(3, 64),
            saved=(0, 3),
            random=True,
            module="a",
        ),
        Op(name="mean", kind="aten.mean.default", inputs=(2,), outputs=(4,), saved=(2,), module="b"),
    ),
    layers=(Layer(name="a", start=0, stop=1, block="one"), Layer(name="b", start=1, stop=2, block="two")),
    inputs=(0,),
    outputs=(4,),
    mode="inference",
    has_loss=True,
    batch_size=3,
)

PLAN = Plan(
    model="gpt-tiny",
    model_sizes=(("batch_size", 8),),
    rewritten="H100",
    graph_hash="0123456789abcdef",
    cluster="2xX1",
    workload=WORKLOAD,
    stages=(StagePlan(start=0, stop=1, ranks=(1, 0), feeds=(1,)), StagePlan(start=1, stop=2, ranks=(2,))),
    num_microbatches=4,
    schedule="mine.py:waves",
    schedule_hash="0123456789abcdef",
    exchange=GradientExchange(
        bucket_bytes=1024,
        overlap=False,
        partition_bytes=512,
        sequence=(1, 0),
        across_steps=True,
        servers=(0, 2),
        credit_bytes=4096,
        clip_norm=True,
        loss_scale=True,
    ),
    sharding=Sharding(
        tensor=2,
        context=2,
        sequence_parallel=True,
        regather=True,
        context_method="all_gather",
        placements=(OpPlacement(op="linear*", axis="context", output_dim=1),),
    ),
    recompute=((0, 1),),
    made_with=MadeWith(measurements="../m.json", measurements_hash="0123456789abcdef", software="meshwright 0.1.0"),
)

PLACEMENT = Placement(
    model="gpt-tiny",
    model_sizes=(("batch_size", 8),),
    graph_hash="0123456789abcdef",
    cluster="2xX1",
    workload=WORKLOAD,
    stages=(PlacedStage(rank=1, ops=(0, 2)), PlacedStage(rank=0, ops=(1,))),
    num_microbatches=4,
)

PROGRAM = Program(
    schedule="1f1b",
    plan_hash="0123456789abcdef",
    num_ranks=2,
    streams=(Stream(rank=0, name="compute"), Stream(rank=1, name="exchange", lane=2)),
    groups=((0, 1),),
    prologue=empty_section(2),
    body=Section(
        stream_offsets=np.array([0, 2, 3]),
        opcode=np.array([Opcode.FORWARD, Opcode.BACKWARD, Opcode.ALL_REDUCE], np.int8),
        stage=np.array([0, 0, 1], np.int32),
        microbatch=np.array([0, 0, 1], np.int32),
        version=np.array([0, 1, 0], np.int32),
        peer=np.array([-1, -1, 2], np.int32),
        group=np.array([-1, -1, 0], np.int32),
        num_bytes=np.array([0, 0, 64]),
        wait_offsets=np.array([0, 0, 1, 2]),
        waits=np.array([0, 3]),
        mark_instruction=np.array([1]),
        mark_index=np.array([2], np.int32),
    ),
    epilogue=empty_section(2),
    advance=4,
    body_steps=2,
)

TIMELINE = Timeline(
    origin="measured",
    num_ranks=2,
    tracks=(Stream(rank=0, name="compute"), Stream(rank=1, name="send", lane=2)),
    track=np.array([0, 1, 0], np.int32),
    opcode=np.array([0, 2, 1], np.int8),
    stage=np.array([0, 0, 0], np.int32),
    microbatch=np.array([0, 0, 0], np.int32),
    peer=np.array([-1, 1, -1], np.int32),
    step=np.array([0, 0, 1], np.int32),
    num_bytes=np.array([0, 64, 0]),
    start_ps=np.array([0, 10, 20]),
    end_ps=np.array([10, 15, 40]),
    memory_rank=np.array([0, 1], np.int32),
    memory_time_ps=np.array([0, 5]),
    memory_bytes=np.array([100, 200]),
    peak_memory_bytes=(100, 200),
    reserved_memory_bytes=(128, 256),
)

MEASUREMENTS = Measurements(
    device="cpu",
    software="torch 2.13",
    date="2026-11-20",
    conditions="idle",
    ops=(OpMeasurement(key="k", forward_s=1e-3, backward_s=2e-3, num_samples=5, spread=0.1, accumulate_s=1e-4),),
    optimizers=(OptimizerMeasurement(kind="adamw", dtype="float32", num_elements=10, num_tensors=2, seconds=1e-4),),
    transfers=(TransferMeasurement(kind="send", num_ranks=2, num_bytes=64, seconds=1e-4, spread=0.2, host_s=1e-5),),
    overhead_s=1e-5,
    batches=(BatchMeasurement(model="m", batch_size=2, seconds=1e-3, p90_s=2e-3, p99_s=3e-3, num_samples=20),),
)

DEPLOYMENT = Deployment(
    models=tuple(
        ServedModel(
            name=f"model {place}",
            slo=Seconds(0.025),
            latency=latency,
            arrivals=arrivals,
            copies=2 + place,
            memory=Bytes(2.0**30),
            load=Seconds(0.01),
            model="mine.py:build",
            sequence_length=4,
            image_size=8,
            inputs=(TensorSpec(name="text", datatype="UINT8", shape=(8,)),),
            outputs=(TensorSpec(name="classes", datatype="FP16", shape=(2, 5)),),
            preprocess="mine.py:before",
            postprocess="mine.py:after",
        )
        for place, (arrivals, latency) in enumerate(
            (
                (Poisson(rate=100.0), Latency(alpha=Seconds(0.001), beta=Seconds(0.005), largest=32)),
                (Gamma(rate=50.0, shape=0.5), Latency(points=((1, Seconds(0.002)), (8, Seconds(0.004))))),
                (Diurnal(low=1.0, high=2.0, period=Seconds(60.0)), Latency(beta=Seconds(0.005))),
                (Trace(file="requests.txt", speed=2.0), Latency(alpha=Seconds(0.001))),
            )
        )
    ),
    devices=4,
    policy="symphony:window=75",
    delay=Seconds(0.0001),
    slack=Seconds(0.001),
    guard=Seconds(0.0005),
    jitter=0.1,
    troubles=(Straggler(device=0, factor=1.5), Outage(device=1, since=Seconds(1.0), until=Seconds(2.0))),
    server=Server(
        host="0.0.0.0",
        port=8080,
        grpc=False,
        grpc_port=8082,
        admin_port=8081,
        fronts=2,
        device="cuda",
        tensor_bytes=2**20,
        body_bytes=2**16,
        header_bytes=2**12,
        receive=Seconds(5.0),
        idle=Seconds(6.0),
        longest_deadline=Seconds(7.0),
        connections=100,
        stuck=Seconds(12.0),
    ),
    device_memory=Bytes(9 * 2.0**30),
    groups=(
        Group(devices=1, models=("model 0", "model 1")),
        Group(devices=2, models=("model 1", "model 3"), weights=(0.5, 2.0)),
    ),
    queries=(
        Query(
            name="query",
            slo=Seconds(0.1),
            rate=10.0,
            calls=(
                Call(name="find", latency=Latency(alpha=Seconds(0.001), beta=Seconds(0.005))),
                Call(
                    name="tell",
                    latency=Latency(alpha=Seconds(0.001), beta=Seconds(0.005)),
                    after="find",
                    fan_out=2.5,
                    memory=Bytes(2.0**30),
                    load=Seconds(0.02),
                ),
            ),
        ),
    ),
    trunks=(
        Trunk(
            name="trunk",
            slo=Seconds(0.1),
            latency=Latency(alpha=Seconds(0.001), beta=Seconds(0.005)),
            heads=(
                Head(
                    name="head",
                    latency=Latency(alpha=Seconds(0.001), beta=Seconds(0.0)),
                    rate=5.0,
                    memory=Bytes(9.0),
                    load=Seconds(0.01),
                ),
            ),
            memory=Bytes(2.0**30),
            load=Seconds(0.02),
        ),
    ),
)

EXAMPLES = {
    "cluster": CLUSTER,
    "deployment": DEPLOYMENT,
    "graph": GRAPH,
    "measurements": MEASUREMENTS,
    "placement": PLACEMENT,
    "plan": PLAN,
    "program": PROGRAM,
    "timeline": TIMELINE,
    "workload": WORKLOAD,
}
