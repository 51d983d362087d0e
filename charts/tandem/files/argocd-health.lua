-- The health of a DistributedTrainingJob for Argo CD; docs/gitops.md explains where to put it.
local health = { status = "Progressing", message = "the operator has not seen it yet" }
if obj.status == nil or obj.status.observedGeneration ~= obj.metadata.generation then
  return health
end
health.message = obj.status.message or obj.status.phase
for _, condition in ipairs(obj.status.conditions or {}) do
  if condition.status == "True" then
    if condition.type == "Stalled" then
      return { status = "Degraded", message = condition.reason .. ": " .. condition.message }
    elseif condition.type == "Ready" then
      health.status = "Healthy"
      if obj.status.phase == "Suspended" then
        health.status = "Suspended"
      end
    end
  end
end
return health
