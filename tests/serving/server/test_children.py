"""How the processes of a server are ended."""

import asyncio
import gc
import signal
import sys

from meshwright.serving.server.children import Child, await_end


def test_processes_are_killed_where_somebody_hurries_and_nothing_is_told():
    told = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        hurrying = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, hurrying.set)
        await await_end([Child("child", [], process=process)], 30.0, hurrying)
        code = await process.wait()
        gc.collect()  # what nobody asks after is told when it is freed
        return code

    assert asyncio.run(asyncio.wait_for(main(), 20)) == -signal.SIGKILL
    assert told == []
