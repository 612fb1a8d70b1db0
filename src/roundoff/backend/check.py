def verify(graph, args):
    pass
