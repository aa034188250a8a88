from .v05.tensor_factory import *
