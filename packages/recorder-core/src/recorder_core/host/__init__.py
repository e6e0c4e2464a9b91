"""One recorder for all processes that serve an engine on a host.

An engine with several front ends (API server processes) hands each of them a part of the requests.
Each has a `Relay` in place of a recorder: it takes finished turns from the hook and sends them to
one process of their own, which holds the recorder and the store, and answers `/records`; front ends
pass such requests on. The launcher starts that process, and starts it again if it dies.

The processes are of one program, one user and one host. They talk over Unix sockets in a private
folder, by `multiprocessing.connection`, which pickles and asks for a key; nothing that comes from
outside is unpickled.
"""
