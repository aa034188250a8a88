from .v05.ep_slice import *
