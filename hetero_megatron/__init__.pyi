from hetero_megatron.api.inputs import Cluster as Cluster
from hetero_megatron.api.inputs import Model as Model
from hetero_megatron.api.jobs import Answer as Answer
from hetero_megatron.api.jobs import Trained as Trained
from hetero_megatron.api.jobs import generate as generate
from hetero_megatron.api.jobs import train as train
from hetero_megatron.api.plans import Comparison as Comparison
from hetero_megatron.api.plans import Memory as Memory
from hetero_megatron.api.plans import Plan as Plan
from hetero_megatron.api.plans import Prediction as Prediction
from hetero_megatron.api.plans import memory as memory
from hetero_megatron.api.plans import predict as predict
from hetero_megatron.api.search import Found as Found
from hetero_megatron.api.search import FoundApart as FoundApart
from hetero_megatron.api.search import FoundFor as FoundFor
from hetero_megatron.api.search import plan as plan
from hetero_megatron.api.shop import Offers as Offers
from hetero_megatron.api.shop import shop as shop
from hetero_megatron.errors import UserError as UserError

__version__: str
