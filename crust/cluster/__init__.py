"""Many nodes with local pools behind one controller: announcements, requests, leadership.

    protocol                     what controller and nodes need of a shared store; `etcd` is the one that there is
    agent, methods               a node's part: it announces its pool, and carries out the calls that it is asked for
    retirement, forever          nodes and pools that are gone for good; work that begins again when it fails
    central/                     a controller's part:
      app, calls                 one leads, and its changes are operations
      controller, group_controller,
      snapshot_metadata          the CSI services; they check what routing needs; the rest is the node driver's
      placement, names, create   where a new volume goes, and that a name is never made in two pools
      routing, listing           the call of one pool, and the lists over all of them
      survey                     records that are missing or stale

The pools are the truth and the store holds intents: what is lost with it is read from the nodes again. A list is
complete or an error, and nothing of a node that is away is treated as gone until an operator retires it.
"""
