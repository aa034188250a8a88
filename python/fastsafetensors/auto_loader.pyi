from .v05.auto_loader import *
