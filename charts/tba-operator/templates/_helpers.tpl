{{- define "tba.name" -}}
{{- $release := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- if contains "tba-operator" $release }}{{ $release }}
{{- else if contains "tba" $release }}{{ $release }}-operator
{{- else }}{{ $release }}-tba-operator{{ end }}
{{- end }}

{{- /* Cluster-scoped objects: two releases of one name in two namespaces must not meet. */}}
{{- define "tba.clusterName" -}}
{{ include "tba.name" . }}-{{ .Release.Namespace }}
{{- end }}

{{- define "tba.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "tba.name" .) }}
{{- end }}

{{- define "tba.selector" -}}
app.kubernetes.io/name: tba-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "tba.labels" -}}
{{ include "tba.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: tba
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* (list CONTEXT LABELS): the chart's labels and the user's; of a name in both, the chart's. */}}
{{- define "tba.labelsWith" -}}
{{- merge (include "tba.labels" (first .) | fromYaml) (last .) | toYaml }}
{{- end }}

{{- define "tba.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tba.pullSecrets" -}}
[{{- range $i, $name := .Values.imagePullSecrets }}{{ if $i }}, {{ end }}{name: {{ $name | quote }}}{{ end }}]
{{- end }}

{{- define "tba.subject" -}}
- kind: ServiceAccount
  name: {{ include "tba.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end }}
