"""The one door to the network: mesh, collectives with their byte ledger, roll call, and a fake world."""

from lightning_dist.comm.fake import fake_world
from lightning_dist.comm.ledger import Ledger
from lightning_dist.comm.mail import Letter, Mail
from lightning_dist.comm.mesh import Axis, Mesh
from lightning_dist.comm.rollcall import Place, RollCall

__all__ = ["Axis", "Ledger", "Letter", "Mail", "Mesh", "Place", "RollCall", "fake_world"]
