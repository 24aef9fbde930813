"""A real federation over Flower: the same rounds and client work as in the simulator, over Flower's
messages.

Also the tools to run one: the app's folder, keys, guarded Flower processes, and a live view of the
nodes. Flower is imported only by the modules that need it: `client`, `server`, `flower_clients`,
`records`.
"""
