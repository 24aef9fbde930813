"""What people need to run a federation: the app's folder, keys, guarded Flower processes, and a view of the nodes.

The federation itself is `fedaux.federation`; nothing here computes.
"""
