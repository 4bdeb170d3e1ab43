{{- define "tandem.name" -}}
{{- .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "tandem.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- printf "%s-operator" .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s-operator" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selectorLabels" . }}
app.kubernetes.io/part-of: tandem
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* An image by digest if given, else by tag, else by the chart's appVersion. */ -}}
{{- define "tandem.image" -}}
{{- $image := index . 0 -}}
{{- $root := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default $root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* Every verb on model objects, with its reason in docs/security.md; the operator checks them at its start. */ -}}
{{- define "tandem.rules" -}}
- apiGroups: [tandem.dev]
  resources: [disaggregatedmodels]
  verbs: [get, list, watch]
- apiGroups: [tandem.dev]
  resources: [disaggregatedmodels/status, disaggregatedmodels/scale]
  verbs: [patch]
- apiGroups: [""]
  resources: [serviceaccounts, configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# Held only because it is granted to pods that discover their peers.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{- define "tandem.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end -}}

{{- define "tandem.settings" -}}
runtime:
  image: {{ include "tandem.image" (list .Values.runtime.image .) }}
  imagePullPolicy: {{ .Values.runtime.image.pullPolicy }}
  env: {{ toJson .Values.runtime.env }}
  podTemplate: {{ toJson .Values.runtime.podTemplate }}
namespaces: {{ toJson .Values.watchNamespaces }}
profiles: {{ toJson .Values.profiles }}
scaling: {{ toJson .Values.scaling }}
gpusPerNode: {{ .Values.gpusPerNode }}
resyncSeconds: {{ .Values.resyncSeconds }}
workers: {{ .Values.workers }}
{{- end -}}
