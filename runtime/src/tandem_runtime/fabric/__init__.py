"""Our binding of the system's libfabric: a C core with one progress thread per NIC group, and its Python
face.
"""
