from .v05.dlpack import *
