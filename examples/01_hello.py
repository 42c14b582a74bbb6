"""Hello: call a function on one worker, call it on all at once, and catch a remote error.

`gradwire.run` starts three worker processes named w0, w1 and w2, and calls `main` in w0.
"""

import os

import gradwire


def greet(who):
    """Runs on the called worker."""
    me = gradwire.get_worker_info()
    return f"{me.name} greets {who}", os.getpid()


def divide(a, b):
    return a / b


def main():
    text, _ = gradwire.rpc_sync("w1", greet, args=("w0",))  # waits for the answer
    print(text)
    assert text == "w1 greets w0"

    futures = [gradwire.rpc_async(f"w{n}", greet, args=("everyone",)) for n in range(3)]
    answers = [future.wait() for future in futures]  # all three ran at the same time
    for text, _ in answers:
        print(text)
    assert [text for text, _ in answers] == [f"w{n} greets everyone" for n in range(3)]
    assert len({process for _, process in answers}) == 3  # each worker is its own process

    story = "nothing was raised"
    try:
        gradwire.rpc_sync("w2", divide, args=(1, 0))
    except ZeroDivisionError as error:  # the original type
        story = str(error)  # includes the traceback of w2
    print(story.splitlines()[0])
    assert story.startswith("ZeroDivisionError on w2: division by zero")
    assert "in divide" in story


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
