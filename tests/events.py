"""An event sink that remembers."""


class SeenEvents:
    """All that was told, one behind the other."""

    def __init__(self):
        self.seen = []

    def progress(self, task, done, total):
        self.seen.append((task, done, total))

    def metric(self, name, value, step):
        self.seen.append((name, value, step))
