from jaxcg._operations import EdgeOrder as EdgeOrder
from jaxcg._operations import sort_edges as sort_edges
from jaxcg._problem import TensorProduct as TensorProduct
