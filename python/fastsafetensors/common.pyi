from .v05.common import *
